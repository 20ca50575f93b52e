"""Train a drafter from prompts: responses, anchors, losses, trainer (paper, 3.3 and 5.1)."""
