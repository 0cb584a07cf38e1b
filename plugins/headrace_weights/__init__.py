"""Weight transports: how a policy version travels from a trainer to engines."""
