"""What any program needs and nothing of DSpark: files, hashes, kept machine code, the machine."""
