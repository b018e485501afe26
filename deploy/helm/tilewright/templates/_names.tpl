{{- define "tilewright.labels" -}}
app.kubernetes.io/name: tilewright
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
