"""Tiers of KV blocks behind the groups' pages: what is kept where, how it is verified, when it is worth fetching."""
