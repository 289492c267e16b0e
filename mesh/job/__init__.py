"""The processes of a job: finding one's place in it, joining, watching over it, ending together."""
