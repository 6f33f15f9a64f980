"""Dubbo-go-Pixiu files, loaded unchanged: recognised by shape, mapped into our model, differences said once."""
