"""What is set or replaced for the CPU as a platform: collectives between processes, and the allocator."""
