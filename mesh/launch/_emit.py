def emit(options): return []
