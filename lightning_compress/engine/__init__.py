"""One step of averaging: from DDP's buckets to means, and what is kept from step to step."""
