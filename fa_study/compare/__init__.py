"""`python -m fa_study compare` and `twin`: whole checkpoints against each other and against what chance does."""
