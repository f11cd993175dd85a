"""The lab: what kvtier does for time to first token, measured on this machine."""
