"""Publishing: shards that need not exist, sent and made visible in one transaction."""
