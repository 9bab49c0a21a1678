"""The demo: a real data set, a network, and what training it on every device looks like.

A user of the rest: nothing else imports it.
"""
