"""Plans: predicts what fits a card before it runs."""
