"""Processes behind one listening socket, under one supervisor."""
