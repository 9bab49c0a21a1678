"""`python -m mirror_nb watch`: the dashboard's numbers in a terminal, of trainings that another process controls."""
