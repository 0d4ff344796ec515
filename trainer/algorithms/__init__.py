"""Algorithms: an advantage estimator, a loss and their settings. One small pure file a part."""
