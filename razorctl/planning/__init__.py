"""What fits a card, known before it runs."""
