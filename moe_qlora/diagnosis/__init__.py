"""Diagnosis of an environment and a model: versions, devices, backends and known problems."""
