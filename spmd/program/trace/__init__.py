"""One trace of a user's function: what it records, and what it refuses."""
