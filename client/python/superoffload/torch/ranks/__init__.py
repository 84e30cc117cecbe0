"""What an optimizer has to know of the other ranks that train with it: shards, replicas, parts of sequences."""
