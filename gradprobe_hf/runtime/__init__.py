"""What any long-running program needs, with no knowledge of pruning: processes, stopwatch, interrupts, YAML options."""
