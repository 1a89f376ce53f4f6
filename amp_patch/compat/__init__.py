"""Old scripts: the names of `apex`, on request only."""
