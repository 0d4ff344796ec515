"""Weight versions: the weights log, checkpoints, publishing."""
