"""The client: send one cell's requests by locust, record exact times, compute its figures."""
