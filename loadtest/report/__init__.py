"""A sweep as one HTML page and its figures as PNG files."""
