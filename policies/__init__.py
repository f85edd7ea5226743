"""Pure decisions: statistics of every (layer, slot) and a budget in, a decision with its reasons out."""
