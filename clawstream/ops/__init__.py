"""Operations on an installation: start, health, status, lag, spool drain."""
