"""What gossip does to accuracy, and what it costs on a link."""
