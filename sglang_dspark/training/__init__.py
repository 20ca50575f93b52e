"""From prompts to a drafter: responses by the target, anchors, losses, trainer (paper, 3.3 and 5.1)."""
