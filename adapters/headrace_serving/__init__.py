"""What adapters share whose engine computes in other processes: weights on their way to them. Knows no engine."""
