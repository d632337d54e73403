"""The gRPC front: clients on one side, worker groups on the other. Holds text; computes nothing on a model."""
