"""Recipes: one complete checkpoint out of several, each parameter with its optimizer state from one of them."""
