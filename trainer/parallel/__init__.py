"""Several processes train one policy: torch.distributed and FSDP2."""
