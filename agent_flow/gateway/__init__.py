"""The gateway as the SDK sees it: its client and the rollout budget."""
