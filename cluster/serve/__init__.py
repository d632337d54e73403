"""Ray Serve: places and supervises the groups and, outside Kubernetes, the routers. The only importer of ray."""
