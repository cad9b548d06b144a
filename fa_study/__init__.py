"""Is Flash Attention stable? The instrument: numerics, distances, snapshots, tables and figures of the study."""
