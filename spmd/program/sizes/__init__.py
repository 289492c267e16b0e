"""Programs for sizes that vary: what a dim's size has part in, and how a larger program computes the same."""
