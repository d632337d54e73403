"""A worker group: continuous batching over paged KV. Holds token ids and pages; knows no text."""
