"""Plans: what fits a card, known before it runs."""
