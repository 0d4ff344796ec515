"""Operations on an installation: start, status, doctor, lag, spool drain."""
