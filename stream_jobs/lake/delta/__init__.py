"""Delta tables: commits, logs, snapshots, damage, repair, maintenance."""
