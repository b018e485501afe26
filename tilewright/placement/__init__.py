"""Choosing a device for each piece of work among different devices: a cost model, and schedules for dependent stages."""
