"""The client: one cell's requests, sent by locust, as records with exact times, and its figures."""
