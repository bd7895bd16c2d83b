"""Models that ``fully_shard`` (FSDP2) has sharded: their replicas average compressed gradients."""
