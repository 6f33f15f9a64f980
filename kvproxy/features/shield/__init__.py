"""Keeps requests away from engines that they would harm, by the advisories of the engines' versions."""
