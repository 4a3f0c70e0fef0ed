"""Commands that plan, simulate and tune training runs."""
