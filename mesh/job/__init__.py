"""Jobs of several processes: how a process finds its place in a job, joins it, monitors it, and ends with the others."""
