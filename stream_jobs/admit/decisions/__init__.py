"""What admission has decided, its journal and its checkpoint."""
