"""Pictures, audio and video in prompts: found, named, measured and counted."""
