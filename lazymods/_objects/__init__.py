"""What Python objects hold: walked, described, compared and copied."""
