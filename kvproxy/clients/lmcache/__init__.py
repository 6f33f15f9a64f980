"""LMCache's two services, as their versions speak: the controller and the coordinator."""
