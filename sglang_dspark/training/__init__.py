"""From prompts to a drafter: responses, anchors, losses, trainer (paper, 3.3 and 5.1)."""
