"""Play tasks: the runner, command lines as flows, the progress."""
