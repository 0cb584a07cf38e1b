"""An environment and an algorithm for Headrace."""
