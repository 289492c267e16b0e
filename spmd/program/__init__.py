"""From a traced function to one compiled, donated, sharded program that runs again and again."""
